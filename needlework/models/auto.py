"""How a folder says what loads it: `auto_map` in its config.json, and the module that this names, which is the installed needlework.

transformers' Auto classes follow it with trust_remote_code=True, so that a program that does not import needlework (lm-eval, a
pipeline) loads the folder. Where needlework.models is imported, its classes are registered and `auto_map` is not read.
"""

from pathlib import Path

MODULE = "modeling_needlework"
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.NeedleworkConfig",
    "AutoModel": f"{MODULE}.NeedleworkModel",
    "AutoModelForCausalLM": f"{MODULE}.NeedleworkForCausalLM",
}
CODE = '''"""The classes of this folder's model: those of the installed needlework (pip install needlework)."""

from needlework.models import NeedleworkConfig, NeedleworkForCausalLM, NeedleworkModel
'''


def write_module(directory: Path) -> None:
    """The module that `AUTO_MAP` names, in a folder that is there or made."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{MODULE}.py").write_text(CODE)


class Installed:
    """A class of an installed package: `auto_map` leads to it, and no folder needs a copy of the file that defines it."""

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """transformers would copy this class's file beside every model saved later."""
