"""GPU kernels and their launchers. Importing the kernel files needs triton only; launching them needs torch."""
