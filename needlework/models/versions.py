"""The releases of transformers that the models work with. With others `generate` would run and write wrong text."""

import transformers

from needlework.extras import VersionError

FIRST, NEXT = (
    (5, 17),
    (5, 24),
)  # 5.24 hands the cache to forward as `cache`; a forward that knows `past_key_values` starts anew each token


def check(version: str = transformers.__version__) -> None:
    """VersionError for a release outside of FIRST to NEXT, NEXT left out."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if not FIRST <= release < NEXT:
        first, after = (".".join(map(str, bound)) for bound in (FIRST, NEXT))
        raise VersionError(
            f"needlework.models needs transformers >= {first} and < {after}, and {version} is installed; "
            f"pip install 'transformers>={first},<{after}'"
        )
