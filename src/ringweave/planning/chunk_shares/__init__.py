"""Chunk shares: the leaders of each part of a message, as fractions by a linear program, then as whole units."""

from ringweave.planning.chunk_shares.block_routes import make_block_stripe
from ringweave.planning.chunk_shares.share_tree import ShareTree, build_share_tree
from ringweave.planning.chunk_shares.stripes import LeaderFractions, lay_out_message, make_stripes, solve_fractions
