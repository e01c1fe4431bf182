"""`baton simulate`: the shipped router, index, scheduler, pool and leases under virtual time, seeded."""
