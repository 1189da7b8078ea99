"""A process that holds one rank of a tensor parallel worker, other than rank 0. It has no scheduler and no policy."""
