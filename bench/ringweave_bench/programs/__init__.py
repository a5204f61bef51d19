"""Programs that run by path: workers of benchmarks and chaos jobs, and the streams that measure links."""
