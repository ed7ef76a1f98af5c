"""How much of the large tests a run does.

A run that repeats another in a second environment may do a part of them: with
PALLASITE_TEST_SHARE=4 a quarter of the random kernels and of the kernels in large
tables (`SAMPLED` in conftest.py).
"""

import os

SHARE = int(os.environ.get("PALLASITE_TEST_SHARE", "1"))
