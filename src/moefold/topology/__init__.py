"""Who stands where: rank arithmetic, without processes."""
