-- Takes whose callers send them again if the answer is lost find their leases by their token. Only tokens of such takes
-- have the first bit set (Token::kept), so no other claim pays for the index.
CREATE INDEX semel_leases_kept ON semel_leases (token) WHERE token >= x'80';
