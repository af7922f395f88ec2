"""Launches whose cost on the host counts: two and more for every content chunk of a call."""

from needlework.ops.common.launch import interpreted


class Repeated:
    """A kernel launched again and again, with pointers as aligned as the first ones: the host looks it up once."""

    def __init__(self, kernel, grid: tuple[int, int, int], constants: dict):
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.launch = None

    def __call__(self, *args) -> None:
        if self.launch is not None:
            self.launch(*args, *self.rest)
            return
        compiled = self.kernel[self.grid](*args, **self.constants)
        if not interpreted():
            self.launch = compiled[self.grid]
            self.rest = [self.constants[name] for name in self.kernel.arg_names[len(args) :]]
