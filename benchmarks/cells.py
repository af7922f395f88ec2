"""The text of a cell of the generated tables."""


def number(x: float | None, digits: int) -> str:
    return "" if x is None else f"{x:,.{digits}f}"


def bar_text(bar: float, met: bool) -> str:
    return f"{bar} {'met' if met else 'NOT met'}"
