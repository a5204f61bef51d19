"""What brings faults about: processes of the job found and hurt, clocks, disks, the job started again."""
