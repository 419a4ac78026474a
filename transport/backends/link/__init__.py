"""The link: what the two ends of every backend say to each other beside the bytes, and who may write when."""
