"""What is printed, read without regard to where its lines were broken."""

from lazyinline.reuse.ir.printer import WIDTH


def unfolded(shown: object) -> str:
    """Returns a printed text as one line."""
    return " ".join(str(shown).split())


def too_long(text: str) -> list[str]:
    """Returns the lines that pass 100 columns and are more than one long word."""
    return [line for line in text.splitlines() if len(line) > WIDTH and len(line.split()) > 1]
