"""Analyses of a kernel that passes and backends query; nothing is changed here."""
