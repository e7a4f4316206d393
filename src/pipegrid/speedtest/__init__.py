"""The speed test: overhead in round trips, throughput beside raw TCP on the same path in the same run."""
