"""The last module that a server of forked processes imports: their collections leave its objects alone, whose pages they would copy."""

import gc

gc.freeze()
