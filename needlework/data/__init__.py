"""Text and tasks: corpora with a manifest, packing, and the synthetic tasks of the field.

Every batch is a pure function of its arguments (rng.py), so training resumes exactly from a step number alone.
"""

from .batch import Batch as Batch
from .batch import Episodes as Episodes
from .corpus import Corpus as Corpus
from .corpus import CorpusConfig as CorpusConfig
from .corpus import Documents as Documents
from .corpus import load_corpus as load_corpus
from .induction import induction_needle as induction_needle
from .mqar import MQAR as MQAR
from .needles import NeedleMix as NeedleMix
from .needles import many_needles as many_needles
from .needles import single_needle as single_needle
from .overwrite import Overwrites as Overwrites
from .overwrite import SelectiveKeyOverwrite as SelectiveKeyOverwrite
from .overwrite import squared_error as squared_error
from .packing import Packed as Packed
from .packing import held_out_text as held_out_text
from .packing import pack as pack
from .packing import windows as windows
from .ruler import MULTI_KEY as MULTI_KEY
from .ruler import MULTI_NEEDLE as MULTI_NEEDLE
from .ruler import NUMBER as NUMBER
from .ruler import PASSKEY as PASSKEY
from .ruler import UUID as UUID
from .ruler import Ruler as Ruler
from .ruler import RulerEpisodes as RulerEpisodes
from .tokenizer import EOT as EOT
from .tokenizer import byte_tokenizer as byte_tokenizer
from .tokenizer import decode_bytes as decode_bytes
from .tokenizer import encode_bytes as encode_bytes
from .tokenizer import eot_id as eot_id
from .tokenizer import load_tokenizer as load_tokenizer
