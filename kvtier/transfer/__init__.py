"""Moving pages between levels: descriptor plans, copy lanes, staging buffers, disk I/O."""
