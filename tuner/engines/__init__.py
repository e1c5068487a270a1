"""Where candidates run: ``local`` takes the GPUs and the CPU cores of this host."""
