"""
The speed test: it measures overhead in round trips, and throughput compared with raw TCP on the same path in
the same run.
"""
