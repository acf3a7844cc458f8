"""The serve agent: what `deployer.agents.text` packs into one text for the target's Python."""
