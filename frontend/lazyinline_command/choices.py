"""What the command's arguments may be, and their defaults.

The compiler has the same names, behind an import of PyTorch; ``tests/test_command_line.py`` holds
both together.
"""

BACKENDS = ("inductor", "eager")
POLICIES = ("full", "selective")
REUSE_CHOICES = ("auto", "marked", "off")
INSPECTED = ("compile", "step")
SHOWN_LEVELS = ("shared", "primitive")
DEFAULT_LAYERS = (4, 8, 16)
MIN_OPSET = 18
ALIGNMENT = 64
EFFORT_S = 5.0
DIRECTORY_VARIABLE = "LAZYINLINE_CACHE_DIR"
SIZE_VARIABLE = "LAZYINLINE_CACHE_MAX_BYTES"
SWITCH_VARIABLE = "LAZYINLINE_CACHE"
SHELLS = ("bash", "zsh", "tcsh")
FORM = "package.module:function, a function without arguments that returns (model, args)"
