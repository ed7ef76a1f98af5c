"""Packages that examples and pages may use and that need not be installed."""

import ast
import importlib.util

import pytest

PACKAGES = ("equinox", "flax", "keras", "torch")


def skip_without_packages(code: str) -> None:
    """Skip a test of `code` where an optional package it imports is missing."""
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(code))
        for name in _names(node)
    }
    for package in PACKAGES:
        if package in imported and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
