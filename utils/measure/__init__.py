"""Behind test_ddp.py, profile_gpu.py and benchmark_ddp.py."""
