"""Runners."""

from .channels_last_runner import ChannelsLastRunner

__all__ = ['ChannelsLastRunner']
