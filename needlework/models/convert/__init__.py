"""Published checkpoints as needlework's: `convert(source, directory)` reads a layout of other people and writes a checkpoint's folder.

One file a layout (`layouts.py` lists them): its config as ours, and our names of tensors with theirs. Nothing is copied that a layout
does not name, and nothing of the source is left over.
"""

from needlework.models.convert.change import Change as Change
from needlework.models.convert.write import convert as convert
