"""Lists of equal steps from lists of blocks: what the attention kernels loop over."""
