"""A checkpoint handed out: whole, with its card, in one commit."""

from pathlib import Path

from needlework.experiment.pretrained import load_model
from needlework.models.hub import pushed
from needlework.report.card import CARD, licensed, write_card


def release(directory: Path, repository: str, *, private: bool = False, licence: str | None = None) -> str:
    """Push a checkpoint's folder to the model `repository` on the Hub; returns the commit's address.

    The folder is loaded first, so that a torn one stays here. A card that is there is kept; licence is written into it.
    ValueError names what is wrong with the folder, OSError what the Hub did not take (`needlework.models.hub`).
    """
    load_model(directory)
    if not (directory / CARD).is_file():
        write_card(directory)
    if licence is not None:
        licensed(directory, licence)
    return pushed(directory, repository, private=private)
