"""Tables that the studies print."""


def rows(printed: str) -> dict[str, list[float]]:
    """Return the figures of each method in the first table of the report."""
    lines = [
        line.split("|")[1:-1]
        for line in printed.split("\n\n")[0].splitlines()
        if line.startswith("|")
    ][2:]
    return {name.strip(): [float(cell) for cell in cells] for name, *cells in lines}
