"""Echoes whatever comes, by asyncio. Usage: echo_server.py ADDRESS PORT"""
import asyncio
import sys


async def serve(reader, writer):
    while data := await reader.read(100_000):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]))
    async with server:
        await server.serve_forever()


asyncio.run(main())
