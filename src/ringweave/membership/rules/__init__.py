"""The protocol, pure: what a coordinator and a member do about what they are told, and when. No clock, no socket."""
