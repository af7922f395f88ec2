"""Language models of any mixers, for transformers: importing this package registers them with its Auto classes."""

from transformers.utils.logging import disable_progress_bar as disable_progress_bar

from needlework.models.cache import NeedleworkCache as NeedleworkCache
from needlework.models.checkpoint import save_checkpoint as save_checkpoint
from needlework.models.config import NeedleworkConfig as NeedleworkConfig
from needlework.models.lucid_attention import register as _register_lucid
from needlework.models.modeling import NeedleworkForCausalLM as NeedleworkForCausalLM
from needlework.models.modeling import NeedleworkModel as NeedleworkModel
from needlework.models.modeling import register as _register
from needlework.models.table_cache import TableCache as TableCache
from needlework.models.versions import check as _check

_check()
_register()
_register_lucid()
