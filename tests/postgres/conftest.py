"""Which accounts this run can speak for.

Root runs the suite as itself and once more as an ordinary user, where such a user can reach checkout and Python at all;
an ordinary user cannot become root.
"""

import os

from tests.postgres.ordinary import interpreter

collect_ignore = ["test_without_root.py"] if os.geteuid() == 0 else ["test_as_root.py", "test_as_ordinary_user.py"]
if os.geteuid() == 0 and interpreter() is None:
    collect_ignore.append("test_as_ordinary_user.py")
