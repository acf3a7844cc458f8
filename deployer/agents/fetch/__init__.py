"""The download agent: fetches the files of a manifest and lets only right bytes have a name.

Runs on the target (stdlib, Python 3.9+) as one zip file that the controller makes of this package
(`deployer.agents.bundle`), in the folder of its job. Reads `manifest.json` there; `main` has the
modes. The token comes from the environment variable HF_TOKEN.

Layout below the model's folder: NAME.part (the bytes so far), NAME.part.map (which of them are
valid, while there are pieces beyond the prefix), NAME.bad (wrong bytes, kept for inspection),
.deployer/verified.json (size, mtime_ns and hashes of what was checked), .deployer/lock,
.deployer/hf and .deployer/incoming (what other methods have under way).
"""
