"""Pipeline parallelism: schedules as data, one runtime for all of them."""
