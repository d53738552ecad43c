"""The exec agent: process 1 of every sandbox. Standard library only; `image.py` bakes this package into the image.

It serves one request at a time on a Unix socket in a directory that only the host and root inside can reach. Commands
and all file operations run as the sandbox user, so a symbolic link set as a trap leads nowhere that this user could not
go. The agent itself holds three capabilities: SETUID and SETGID to become that user, KILL to end its processes.

As process 1 it sees every process of the sandbox: `kill(-1)` reaches what `setsid` and double forks would hide, and
orphans become its children, so "no child is left" means that no process is left. It leaves limits to the container,
and to the host everything about leases but their name: a request must carry the name of the current lease, so that a
stale holder cannot act in a sandbox that was given to someone else.
"""
