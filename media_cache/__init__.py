"""The media cache: one process per host that keeps preprocessed images, videos and their embeddings."""
