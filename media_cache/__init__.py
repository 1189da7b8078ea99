"""The media cache: one process on each host, which keeps preprocessed images and video and their embeddings."""
