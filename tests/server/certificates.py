"""Files for HTTPS, of use to nobody else: a certificate for "localhost" that signs itself."""

from __future__ import annotations

from pathlib import Path

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUQO+lxGfLqPrOag14r13Nr0TbW08wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTIwNzExNTQxM1oYDzIxMjYxMTEz
MTE1NDEzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAR4SKF0RQAGVOl+2T+6KvOHXKqNvsdraxObv6Y6Jr1n44a3XdgszeGQ
/kknt3SyG6BFAqVa53XU5OXms1BHvkLeo1MwUTAdBgNVHQ4EFgQUgL1rJtZ4ZQBK
woay64E3AihZO90wHwYDVR0jBBgwFoAUgL1rJtZ4ZQBKwoay64E3AihZO90wDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiEAvctGeR0Z12y9d94MwOZv
s3xNcVN5MnxtrH7EWqCNvxQCIGWBrKN+EF7d7Oj6LxmrSkO9q5U6dVJ0Bkdxv63I
in4N
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgKi/7GLJLTgSt8ZE0
vJwQWIJ3/wo4t9IbfW3e8xv6MuqhRANCAAR4SKF0RQAGVOl+2T+6KvOHXKqNvsdr
axObv6Y6Jr1n44a3XdgszeGQ/kknt3SyG6BFAqVa53XU5OXms1BHvkLe
-----END PRIVATE KEY-----
"""
OTHER_KEY = """\
-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIASJE2Dm7PQKql2sUGRoZ8rHJIOoLGgINMGCpfP5hrO2oAoGCCqGSM49
AwEHoUQDQgAE0OOiq6tQDgUt2EkFyviwLN0/TTqAizkHTqekfSW3LVhEa4ZtS4yA
AmxGTnZgUwUk7q0rqhK+GrktLVawOqiTJw==
-----END EC PRIVATE KEY-----
"""
# The passphrase is "x".
ENCRYPTED_KEY = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,F618905DDE0B87D97FD40A0885E051AF

FaVLoeaftoN9BoSEL6d5Tv198mxgGbuZdq9zBxAx3cPVNKjGNuE+bBcExcdfPzuc
PA3svmV6M7lsxmjFDImHJScRht9BohWjLGLytKQe28HFKsFUSUQO3jtzQ7UMErQ0
rYWSajCAgCupfxW3aAHC30r7XVXMlWyi0gVKJZ/WeoE=
-----END EC PRIVATE KEY-----
"""


def write(directory: Path, name: str, content: str) -> str:
    """Path of a new file."""
    path = directory / name
    path.write_text(content)
    return str(path)
