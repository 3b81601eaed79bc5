"""The machine that a run uses: processes, files, disks, locks, hardware."""
