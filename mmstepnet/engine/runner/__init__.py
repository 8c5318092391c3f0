"""Runners."""

from .channels_last_runner import ChannelsLastRunner, to_channels_last

__all__ = ['ChannelsLastRunner', 'to_channels_last']
