"""One run of a job, from its specification to its report."""
