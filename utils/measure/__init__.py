"""Machine checks, profiling and scaling: the code behind test_ddp.py, profile_gpu.py and benchmark_ddp.py."""
