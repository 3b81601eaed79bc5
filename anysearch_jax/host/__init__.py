"""The machine beneath a run: processes, files, disks, locks, hardware."""
