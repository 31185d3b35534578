"""Command lines that differ from another one."""


def changed(given, flags):
    """Return arguments, and flags in the place of those of the same name, with a value each."""
    anew = {flag for flag in flags if str(flag).startswith("--")}
    pairs = zip(("", *given), given, strict=False)
    return (*(word for before, word in pairs if not anew & {before, word}), *flags)
