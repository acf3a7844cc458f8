"""The download agent: fetches the files of a manifest and lets only right bytes have a name.

Runs on the target (stdlib, Python 3.9+) as one zip file that the controller makes of this package
(`deployer.agents.bundle`), in the folder of its job. Reads `manifest.json` there, writes `progress`
(one JSON line a second) and log lines to stdout. The token comes from the environment variable
HF_TOKEN.

Layout below the model's folder: NAME.part (a prefix of the file), NAME.bad (wrong bytes, kept for
inspection), .deployer/verified.json (size, mtime_ns and hashes of what was checked), and
.deployer/lock.
"""
