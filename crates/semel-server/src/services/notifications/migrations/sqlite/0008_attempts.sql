-- Checksum of the first text: f5e7a53c3f2e6dd8beaa5e1a130bb6003b562b513b590512a07e4dc97e3e65f4bb82948d5cb1d1fd64523a91c4c93a3c
-- Its statements: 6edd05113e24398f

-- The number of the last delivery attempt; 0 before the first. With error, it shows how far a PENDING delivery is.
-- Differs from PostgreSQL's in type names.

ALTER TABLE notifications ADD COLUMN attempt INTEGER NOT NULL DEFAULT 0;
