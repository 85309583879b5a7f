"""`shardwright launch`: files with which SLURM, Ray and SkyPilot start a job."""
