"""Memory of this process, as Linux counts it."""


def process_memory(field: str) -> int:
    """Bytes by a field of `/proc/self/status`: `"RssAnon"` for private ones, without the pages of mapped files, which
    the system may drop; `"VmHWM"` for the peak, which unlike `getrusage`'s is not inherited from the parent."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{field}:"))
