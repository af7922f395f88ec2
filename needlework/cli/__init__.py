"""The command line: what each command reads and prints. The work is done in `needlework/experiment`.

One small file a group of commands; overrides.py is --set.
"""

from .checkpoints import load_checkpoint as load_checkpoint
from .entry import main as main
from .overrides import changed as changed
from .recipes import load_recipe as load_recipe
