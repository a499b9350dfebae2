"""Exit codes: what a script or CI can tell from a command without reading what it printed."""

FITS, FAILED, DOES_NOT_FIT, WRONG_USAGE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 64, 130, 141
# As diff(1) has it: one that fails must not look like one that found a difference.
SAME, DIFFERENT, TROUBLE = 0, 1, 2

HELP = "exit codes: 0 fits, 2 does not fit, 64 wrong usage, 130 interrupted, 1 any other error"
DIFF_HELP = (
    "exit codes: 0 no difference, 1 a difference, 2 trouble (the step does not fit the budget of "
    "the plan, too), 64 wrong usage, 130 interrupted"
)
