"""Run the tests that need a browser, with one that is fetched where none is installed.

``python -m tests.browser`` takes further arguments of pytest. Exit status 0 when every such test
ran and passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.debian import Packages, Unavailable, library_path
from tests.kvtier.chromium import find_chromium

_PROJECT = Path(__file__).resolve().parents[1]
_BUILD = _PROJECT / "build" / "browser"
_PACKAGE = "chromium-headless-shell"
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
<dir>{root}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{root}/cache</cachedir>
</fontconfig>
"""


def main(arguments: list[str]) -> int:
    environment = dict(os.environ)
    if not find_chromium()[0]:
        try:
            environment["CHROMIUM"] = str(_fetched())
        except Unavailable as error:
            print(f"no browser can be had here, so no test ran: {error}", file=sys.stderr)
            return 1
    pytest = [sys.executable, "-m", "pytest", "-m", "chromium", "--require=chromium"]
    return subprocess.run([*pytest, *arguments], cwd=_PROJECT, env=environment).returncode


def _fetched() -> Path:
    """Return a script that starts a browser which is not installed."""
    root = Packages(_BUILD).with_needed([_PACKAGE])
    fonts, script = root / "fonts.conf", root / _PACKAGE
    fonts.write_text(_FONTS.format(root=root))
    script.write_text(
        "#!/bin/sh\n"
        f"export LD_LIBRARY_PATH={library_path(root)} FONTCONFIG_FILE={fonts}\n"
        f'exec {root}/usr/lib/chromium/{_PACKAGE} "$@"\n'
    )
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
