-- Checksum of the first text: 59ccd5a0ae4cc234d43f0f87ecf60574d1b0019f8933c69fca0919c7c84e803556fdb013caa8dd9b125c356850231e6a
-- Its statements: ab0a7ab806716892

-- The number of the last delivery attempt; 0 before the first. With error, it shows how far a PENDING delivery is.

ALTER TABLE notifications ADD COLUMN attempt BIGINT NOT NULL DEFAULT 0;
