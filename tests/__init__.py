import gc

from tests.measured import measure

measure()
# What was just left is found within a few thousand objects (700 is Python's default), so a fault still shows
# near the test that made it. All that is there, every test's modules, is looked through far more seldom:
# with the defaults that took a fifth of the time of tests with large grids.
gc.set_threshold(3000, 10, 50)
