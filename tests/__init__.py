import gc
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.measured import measure

measure()
# What Hypothesis reads out of every module and of Unicode is the same in each of trial's processes, which
# have directories of their own, and in the next run. Of examples it remembers none: each run draws the same.
set_hypothesis_home_dir(str(Path(__file__).parent.parent / ".hypothesis"))
# A machine that is busy is no fault of the code: neither a slow example nor slow drawing fails a test.
settings.register_profile(
    "house",
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("house")
# What was just left is found within a few thousand objects (700 is Python's default), so a fault still shows
# near the test that made it. All that is there, every test's modules, is looked through far more seldom:
# with the defaults that took a fifth of the time of tests with large grids.
gc.set_threshold(3000, 10, 50)
